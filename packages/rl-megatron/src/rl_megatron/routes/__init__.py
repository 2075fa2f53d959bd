"""Router replay: decides which batches carry routes, lays routes out over the mesh, and makes routers follow them."""
