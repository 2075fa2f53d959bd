"""vLLM as a rollout engine: servers as Ray actors, and the client that speaks to them over HTTP.

In the trainer's process: `plugin` is the entry point with its keys in `options`; `launch` starts servers with the
`engine_arguments` that the options mean, each in its `placement`, as a `server_group`; `client` is the
InferenceClient, below it `pool` (which server takes a request), `connection` (one server's HTTP) and `supervisor`
(dead servers come back); `router` gives outside agents one address. In a server's process: `server` is the actor
(`serve` one without Ray), `routes` its HTTP, below it `tokens` (who may ask), `bodies` (what may be asked), `calls`
(a request is answered once), `served_engine` (the engine, with the version of every token) and `adapters` (which one
a request gets). In the engine's workers: `weights`, and `fixes` of what vLLM gets wrong. `wire` is what crosses
between trainer and servers.
"""
