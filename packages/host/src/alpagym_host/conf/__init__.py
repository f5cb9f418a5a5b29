"""The YAML of the host: defaults, groups and experiments. Other packages add theirs by `alpagym.configs`."""
