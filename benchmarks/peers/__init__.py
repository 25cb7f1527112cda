"""What is measured: one adapter file for each implementation."""

from benchmarks.peers import cudnn_hopper, fla_triton, ours, published

PEERS = {peer.name: peer for peer in (*ours.PEERS, published.PEER, cudnn_hopper.PEER, fla_triton.PEER)}
