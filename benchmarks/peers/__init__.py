"""What is measured: one adapter file for each implementation."""

from benchmarks.peers import fla_triton, ours

PEERS = {peer.name: peer for peer in (*ours.PEERS, fla_triton.PEER)}
