"""Orthogonalized momentum for the weight matrices (Jordan et al. 2024, "Muon"); AdamW does the embedding and the norms."""

import torch

# Coefficients of the quintic Newton-Schulz iteration.
A, B, C = 3.4445, -4.7750, 2.0315


class Muon:
    """Matrices of one shape are stepped together. Tall ones are turned on their side."""

    def __init__(self, parameters, momentum=0.95, decay=0.02):
        self.groups, self.momentum, self.decay = {}, momentum, decay
        for parameter in parameters:
            shape = (min(parameter.shape), max(parameter.shape))
            self.groups.setdefault(shape, []).append(parameter)
        self.state = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate):
        """One update with learning rate `rate`."""
        for shape, group in self.groups.items():
            gradients = torch.stack([p.grad if p.shape[0] <= p.shape[1] else p.grad.T for p in group])
            momentum = self.state[shape].lerp_(gradients, 1 - self.momentum)
            update = orthogonal(gradients.lerp(momentum, self.momentum)).float()
            for parameter, change in zip(group, update, strict=True):
                tall = parameter.shape[0] > parameter.shape[1]
                scale = max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - rate * self.decay).add_(change.T if tall else change, alpha=-rate * scale)


def orthogonal(x):
    """The nearest orthogonal matrices to [n, rows, columns], by five Newton-Schulz steps in bfloat16."""
    x = x.bfloat16()
    x = x / (x.flatten(1).float().norm(dim=1).to(x.dtype)[:, None, None] + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = A * x + (B * a + C * a @ a) @ x
    return x
