"""The loop: a generating task and a training task that exchange groups.

`training_loop` is the loop, and `buffer` holds its groups. `rollouts` plays groups and `step_training` trains on them;
`group_selection` leaves some out. `evaluation` plays held-out rows. `failures`, `step_metrics`, `timing` and `reporter`
report what happens, and `interrupts` and `concurrency` stop it.
"""
