"""Uses of a log beyond reading it: exports, traces, regenerated rollouts and what-if predictions."""
