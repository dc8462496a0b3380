"""Processes started by torchrun: they agree with the simulator, survive a death with a clear error, and resume."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from fairtrial.errors import FairtrialError
from fairtrial.training.decentralized_bilevel import ProcessGroup, QuadraticOracle, Ring
from fairtrial.training.decentralized_bilevel.agreement import advance, build

folder, killed = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end the others before they have said why they end
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
oracle = QuadraticOracle(n, 2, 3)
opt = build(oracle, ProcessGroup(Ring(n), timeout=10.0))
calls, kept = 0, f"{folder}/{rank}.pt"
if os.path.exists(kept):
    state = torch.load(kept, weights_only=True)
    calls = state.pop("calls")
    opt.load_state_dict(state)
try:
    while calls < 40:
        if calls == 25 and rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(oracle, opt, 1, calls)
        calls += 1
        if calls % 10 == 0:
            torch.save(opt.state_dict() | {"calls": calls}, kept)
except FairtrialError as error:
    with open(f"{folder}/{rank}.error", "w") as file:
        file.write(str(error))
    raise
torch.save(opt.variables, f"{folder}/{rank}.end")
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(n, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_four_processes_compute_fifty_steps_bit_for_bit_as_the_simulator(tmp_path):
    done = torchrun(4, "-m", "fairtrial.training.decentralized_bilevel.agreement", str(tmp_path / "equal.pt"))
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "equal.pt", weights_only=True) == {"equal": 50.0, "steps": 50}


def test_when_one_process_is_killed_the_others_say_so_and_a_run_resumes_from_its_checkpoint(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    broken.mkdir()
    whole.mkdir()
    assert torchrun(3, str(script), str(broken), "1").returncode != 0
    errors = [(broken / f"{rank}.error").read_text() for rank in (0, 2)]
    for rank, error in zip((0, 2), errors, strict=True):
        assert error.startswith(f"rank {rank}, step ")
        assert "start all processes again from their last checkpoint" in error
    assert any("edge" in error and "rank 1" in error for error in errors), errors
    assert torchrun(3, str(script), str(broken), "-1").returncode == 0
    assert torchrun(3, str(script), str(whole), "-1").returncode == 0
    for rank in range(3):
        resumed, straight = (torch.load(f / f"{rank}.end", weights_only=True) for f in (broken, whole))
        assert all(torch.equal(resumed[name], straight[name]) for name in straight)
