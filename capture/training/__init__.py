"""How the embedded checkpoints were made: corpus, tasks, architectures, training, measured figures."""
