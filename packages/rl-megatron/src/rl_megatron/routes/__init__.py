"""Router replay: which batches carry routes, how routes are laid out over the mesh, and routers that follow them."""
