"""Router replay: which batches carry routes, where they lie over the mesh, and routers that follow them."""
