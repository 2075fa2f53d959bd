"""One rank at work: its place in the mesh, micro-batches, the pipeline's schedule, optimizer steps, states on disk."""
