"""AlpaSim topologies for AlpaGym: YAML that AlpaSim's Hydra finds by the entry-point group alpasim.configs."""
