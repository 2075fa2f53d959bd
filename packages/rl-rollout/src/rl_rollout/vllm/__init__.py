"""vLLM as a rollout engine: servers as Ray actors, and the client that speaks to them over HTTP.

Modules in the trainer's process: `plugin` is the entry point, `options` declares its configuration keys, and
`memory_plan` estimates an engine's memory. `launch` starts the servers: `engine_arguments` converts the options for
vLLM, `placement` chooses nodes and GPUs, and `server_group` creates the Ray actors. `client` implements
`InferenceClient`; `pool` chooses a server for each request, `connection` calls it over HTTP, and `supervisor` restarts
dead servers. `router` gives outside agents one address.

Modules in a server's process: `server` is the Ray actor, and `serve` starts a server without Ray. `routes` handles HTTP
requests; it uses `tokens` (authorization), `bodies` and `agent_bodies` (validation), `calls` (computes each request
once), `error_texts` (removes paths from errors) and `served_engine` (records each token's version). `served_engine`
calls vLLM's engine through `engine_cores` (all data-parallel engines), `preparing` (new weights) and `adapters`
(chooses a request's adapter).

In the engine's processes, `weights` receives new weights, `fixes` works around bugs of vLLM, and `orphans` ends a
process whose server has ended. `wire` defines the format of messages between trainer and servers.
"""
