"""vLLM as a rollout engine: servers as Ray actors, and the client that speaks to them over HTTP.

In the trainer's process: `plugin` is the entry point, with its keys in `options`; `launch` starts servers with
`engine_arguments` made from the options, each in its `placement`, as a `server_group`; `client` is the InferenceClient,
which uses `pool` (chooses a server for each request), `connection` (one server's HTTP) and `supervisor` (restarts dead
servers); `router` gives outside agents one address. In a server's process: `server` is the actor (`serve`: a server
without Ray), `routes` its HTTP, which uses `tokens` (authorization), `bodies` (validation of requests), `calls`
(computes each request once), `served_engine` (the engine, with the version of every token) and `adapters` (chooses a
request's adapter). In the engine's workers: `weights`, and `fixes` for vLLM's bugs. `wire` is the format between
trainer and servers.
"""
