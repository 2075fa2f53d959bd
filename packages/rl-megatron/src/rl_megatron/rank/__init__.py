"""The work of one rank: joins the mesh, lays out micro-batches, runs pipeline schedules, makes routers follow recorded
routes, steps the optimizer and saves state."""
