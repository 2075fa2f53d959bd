"""What one rank does: it joins the mesh, lays out micro-batches, runs pipeline schedules, steps the optimizer and saves
its state."""
