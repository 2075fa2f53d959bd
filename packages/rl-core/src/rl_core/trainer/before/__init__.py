"""Before the run: reads its data, builds its settings, and checks all of it. Nothing here starts a rank or an engine.

`preflight` makes every check, with `data` (rows), `environment_checks` and `prompt_lengths` (rows that fit),
`conversation_proof` (chat templates) and `streaming` (whether groups may be trained on as they finish). `settings`
turns the configuration into the settings of each part. For `rl plan`, `planned_run` gets the plug-ins' plans,
`memory_plan` adds them up, and `rehearsed_run` rehearses a step.
"""
