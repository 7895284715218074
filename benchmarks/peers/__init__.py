"""General solvers on the paper's mixed-integer cone model, for comparison alone: nothing of ours rests on them."""
