#!/bin/bash
# torch 2.13.0: torch.optim.Muon iterates in bfloat16 for every dtype. With float32 weights and gradients the update is
# float32 too, but gradients that differ by one part in a million (what another order of a sum over ranks makes) give
# updates that differ by up to 2 %, because the iteration first rounds, and then enlarges small singular values. The same
# five iterations in float32 differ by 5e-5 at most. So a run with this optimizer does not repeat on another mesh to
# better than about a hundredth of each update, however exact its gradients are. AdamW's updates have no such step.
# Seen: largest to smallest singular value 1, 1e2, 1e4: 6e-3, 1e-2, 2e-2 in torch; 2e-6, 8e-6, 5e-5 in float32.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
"$dir/venv/bin/python" - <<'PY'
import torch

torch.manual_seed(0)
rows, columns = 64, 48
left = torch.linalg.qr(torch.randn(rows, columns).double())[0]
right = torch.linalg.qr(torch.randn(columns, columns).double())[0]
A, B, C = 3.4445, -4.775, 2.0315  # torch's own defaults


def by_torch(gradient):
    weight = torch.nn.Parameter(torch.zeros(rows, columns))
    weight.grad = gradient.clone()
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    assert weight.dtype == torch.float32
    return weight.detach()


def in_float32(gradient):
    x = gradient.T / gradient.norm()
    for _ in range(5):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return -x.T


def change(step, gradient, nudged):
    return float((step(nudged) - step(gradient)).norm() / step(gradient).norm())


for decades in (0, 2, 4):
    singular_values = torch.logspace(0, -decades, columns, dtype=torch.float64)
    gradient = (left * singular_values @ right).float()
    nudged = gradient * (1 + 1e-6 * torch.randn(rows, columns).sign())
    rounded, exact = change(by_torch, gradient, nudged), change(in_float32, gradient, nudged)
    print(f"singular values over {decades} decades: torch.optim.Muon {rounded:.0e}, the same in float32 {exact:.0e}")
    assert rounded > 2e-3 and exact < 2e-4 and rounded > 100 * exact
PY
