"""Training runs: `pretrain`, its arguments, data, checkpoints, and sampling from them."""
