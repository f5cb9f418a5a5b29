"""Episodes from process to process through NCCL, or through gloo where there is no GPU.

`rendezvous` finds the other end, `message` makes one buffer of an episode, `channel` moves buffers, `ends` is the
transport.
"""
