"""State: what a run leaves on disk, and how a later run continues from it.

`run_directory` prepares the run's folder, `run_lock` keeps it for one process, and `fingerprint` tells whether a
resumed run is the same run. `saving` writes a checkpoint in the format of `checkpoint`, and `remote_checkpoints` copies
it. A checkpoint also holds groups (`stored_groups`) and the engines' answers so far (`recorded_answers`), from which
`resumed_groups` continues.
"""
