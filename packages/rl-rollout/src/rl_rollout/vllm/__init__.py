"""vLLM as a rollout engine: servers as Ray actors, and the client that speaks to them over HTTP.

Modules in the trainer's process: `plugin` is the entry point, and `options` declares its configuration keys. `launch`
starts the servers: `engine_arguments` converts the options for vLLM, `placement` chooses nodes and GPUs, and
`server_group` creates the Ray actors. `client` implements `InferenceClient`; `pool` chooses a server for each request,
`connection` calls it over HTTP, and `supervisor` restarts dead servers. `router` gives outside agents one address.

Modules in a server's process: `server` is the Ray actor, and `serve` starts a server without Ray. `routes` handles HTTP
requests; it uses `tokens` (authorization), `bodies` (validation), `calls` (computes each request once), `served_engine`
(runs the engine and records each token's version) and `adapters` (chooses a request's adapter).

In the engine's workers, `weights` receives new weights, and `fixes` works around bugs of vLLM. `wire` defines the
format of messages between trainer and servers.
"""
