"""The update: what one batch does to policy and critic.

`collate` makes a batch of trajectories, with `step_merging` if turns share tokens. `batch_update` scores the batch and
trains on it: `scoring_pass` decides which scores it needs, `batch_advantages` adds the columns of the loss, and
`model_update` takes the optimizer steps of one model. `models` holds policy, critic and reference; an engine may serve
the reference (`served_reference`).
"""
