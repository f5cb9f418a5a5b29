"""The PhysicalAI-AV dataset: reader, open-loop world, synthetic stand-in."""
