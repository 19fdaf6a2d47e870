"""Using what a run has trained: evaluate it, predict with it, take it away."""
