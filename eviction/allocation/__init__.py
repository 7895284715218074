"""How a budget is shared among layers and KV heads: one file an allocator."""
