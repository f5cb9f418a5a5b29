"""Reward terms: parts of a reward that add up over an episode. Configs in `config`, one file a family of terms."""
