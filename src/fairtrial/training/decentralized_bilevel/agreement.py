"""Whether processes compute what one process does: ``torchrun --nproc-per-node 4 -m ...agreement out.pt``.

Every rank runs the quadratic oracle under heavy-tailed noise over ``gloo`` and rank 0 also in one process with
``exact=True``; it writes how many steps agree to the bit.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from fairtrial.seeds import torch_generator
from fairtrial.training.decentralized_bilevel.network import Ring
from fairtrial.training.decentralized_bilevel.optimizer import DecentralizedBilevel
from fairtrial.training.decentralized_bilevel.oracle import QuadraticOracle, student
from fairtrial.training.decentralized_bilevel.processes import ProcessGroup


def build(oracle: QuadraticOracle, network: Any, **options: Any) -> DecentralizedBilevel:
    """Return the optimizer of an oracle's problem, from zero."""
    x, y = (torch.zeros(size, dtype=torch.float64) for size in oracle.sizes[:2])
    return DecentralizedBilevel(oracle.upper, oracle.lower, x, y, network=network, **options)


def sample(oracle: QuadraticOracle, opt: DecentralizedBilevel, node: int, call: int, df: float = 1.5) -> dict[str, Any]:
    """Return a node's batch: Student-t noise of its own for every call."""
    g = torch_generator(opt.seed, "agreement", node, call)
    x, y = (0.1 * student((size,), df, g) for size in oracle.sizes[:2])
    return {"node": torch.tensor(node), "x": x, "y": y}


def advance(oracle: QuadraticOracle, opt: DecentralizedBilevel, calls: int, begin: int = 0) -> Tensor:
    """Make ``calls`` calls of ``step`` and return the nodes' variables after each, (calls, nodes, P)."""
    seen = []
    for call in range(begin, begin + calls):
        upper = [sample(oracle, opt, node, 2 * call) for node in opt.nodes]
        lower = [sample(oracle, opt, node, 2 * call + 1) for node in opt.nodes]
        one = isinstance(opt.gossip, ProcessGroup)  # a process is given its own batch
        opt.step(upper[0] if one else upper, lower[0] if one else lower)
        seen.append(torch.cat(list(opt.variables.values()), 1))
    return torch.stack(seen)


def main() -> None:
    """Compare on every rank, and write the smallest number of equal steps from rank 0."""
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    oracle = QuadraticOracle(size)
    group = ProcessGroup(Ring(size))
    apart = advance(oracle, build(oracle, group), args.steps)[:, 0]  # (steps, P)
    together = advance(oracle, build(oracle, Ring(size), exact=True), args.steps)[:, rank]
    equal = group.smallest(float((apart == together).all(1).sum()))
    if rank == 0:
        torch.save({"equal": equal, "steps": args.steps}, args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
