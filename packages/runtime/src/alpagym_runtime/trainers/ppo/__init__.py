"""PPO with a learnt value: configuration, advantages, the loop's own parts."""
