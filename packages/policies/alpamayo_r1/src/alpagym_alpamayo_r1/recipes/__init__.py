"""The published recipes of SFT, under their own keys: one YAML a stage over a base."""
