"""YAML presets of the Alpamayo policies, found by the entry-point group alpagym.configs."""
