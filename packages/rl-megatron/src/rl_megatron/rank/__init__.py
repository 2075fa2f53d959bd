"""The work of one rank: joins the mesh, lays out micro-batches, runs pipeline schedules, steps the optimizer and saves
state."""
