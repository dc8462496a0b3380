import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from fairtrial.training.gauss_newton import FastGaussNewton
from fairtrial.training.networks import mlp

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
x, y = torch.randn(24, 6, generator=draw, dtype=torch.float64), torch.randint(5, (24,), generator=draw)
group = None
if rank >= 0:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    group, part = torch.distributed.group.WORLD, slice(0, 9) if rank == 0 else slice(9, 24)
    x, y = x[part], y[part]
model = mlp([6, 8, 5]).double()
optimizer = FastGaussNewton(model.parameters(), cg_tol=1e-10, cg_max_iter=99, process_group=group, l2=0.01)
for _ in range(4):
    optimizer.step(lambda: (model(x), y))
print(optimizer.last.new_loss, *(float(p.sum()) for p in model.parameters()))
"""


@pytest.mark.slow
def test_two_ranks_that_share_a_batch_take_the_steps_of_one(tmp_path):
    running = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE)
        for rank in (-1, 0, 1)
    ]
    alone, *ranks = ([float(word) for word in process.communicate(timeout=120)[0].split()] for process in running)
    assert len(alone) == 5
    for rank in ranks:
        assert rank == pytest.approx(alone, rel=1e-7)
