"""Other people's training loops, with this engine underneath. Each needs an extra of its own."""
