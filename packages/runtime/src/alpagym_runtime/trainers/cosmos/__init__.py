"""NVIDIA's Cosmos-RL as the trainer: its options, and what they ask of the machines."""
