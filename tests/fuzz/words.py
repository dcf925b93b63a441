"""The vocabulary of generated programs: statements as users write them, a paragraph each.

Every value of a program is a tensor [rows, 4]. A statement makes the value {o} of the values {a} and {b};
names that begin with {t} are its own. `self.name` is declared by FEATURES. The kinds say where torch itself
can run a statement, without remat.
"""

from __future__ import annotations

# Under every transform, in every backend.
PURE = """
{o} = torch.sin({a})

{o} = torch.tanh({a} @ self.w)

{o} = F.gelu(self.lin({a}))

{o} = F.relu({a}) - {b}

{o} = {a} * {b}.sigmoid()

{o} = {a} + 0.5 * {b}

{o} = {a} * torch.full((1,), 0.3, dtype={a}.dtype).cos() + {b} * torch.full((1,), 0.3, dtype={a}.dtype).sin()

{t} = torch.stack([torch.ones(1, dtype={a}.dtype), torch.ones(1, dtype={a}.dtype)])
{o} = ({a} * {t}[0].exp()).tanh() * {t}[1]

{o} = {a} / (1 + {b} ** 2)

{o} = {a}.softmax(-1)

{o} = F.layer_norm({a}, (4,), self.scale)

{o} = F.linear(torch.tanh({a} @ self.w), self.w)

{o} = self.mlp({a})

{o} = self.tied({a}).cos()

{o} = torch.cat([{a}[:, 2:], {b}[:, :2].sin()], 1)

{o} = torch.stack([{t}.exp() for {t} in {a}.tanh().unbind(1)], 1)

{o} = {a}.sum(0, keepdim=True).sin().expand_as({b})

{o} = {a}.max(0, keepdim=True)[0] * {b}

{o} = {a}.topk(2, dim=1)[0].repeat(1, 2)

{o} = {a}[:, torch.tensor([1, 0, 3, 2])].exp().tanh()

{o} = torch.where({a} > 0, {a}, {b}.sin())

{o} = torch.cumsum({a}, 1).sin()

{o} = F.scaled_dot_product_attention({a}[None, None], {b}.sin()[None, None], {a}[None, None])[0, 0]

{o} = torch.tanh(torch.bmm({a}.view(-1, 2, 2), {b}.reshape(-1, 2, 2))).flatten(1)

{o} = torch.einsum("ri,ij->rj", {a}, self.w).sin()

{o} = checkpoint_name(torch.tanh({a} @ self.w), "h")

{o} = {a} * {a}.detach()

with torch.no_grad():
    {t} = {a}.sin().exp()
{o} = {a} * {t}

{o} = F.normalize({a}, dim=1, eps=1e-3)

{o} = {a}.sort(dim=1)[0] * {b}

{o} = torch.logsumexp({a}, 1, keepdim=True) + {b}

{o} = {a}.t().sin().contiguous().t() * {b}

{o} = torch.tril(torch.tanh({a}.t() @ {b}))[:1] + {a}

{o} = torch.fft.fft({a}).real.tanh()

{o} = torch.view_as_real(torch.complex({a}, {b}).conj() * torch.complex({b}, {a})).sum(-1).tanh()

{t} = torch.unsafe_chunk({a}.sin(), 2, 1)
{o} = torch.cat([{t}[1].exp(), {t}[0]], 1)

{t}, {t}2 = {a}.chunk(2, 1)
{o} = torch.cat([{t} * {t}2, {t}2.sin()], 1)

{o} = {a} * self.table[torch.arange(len({a})) % 5].sin()

{o} = {a} * self.factor + {b} * self.offset

{o} = run_chain([torch.sin, torch.tanh], {a})

{t} = dict(h={a}, rest=[{b}, (None, 2)])
{o} = {t}["h"].sin() * {t}["rest"][1][1]

{o} = {a}.as_strided((2, 4), (4, 1)).sin().sum() + {b}

{o} = torch.addmm(self.scale, {a}.cos(), self.w)

{o} = nn.functional.embedding(torch.arange(len({a})) % 5, self.table) * {a}

{o} = torch.func.functional_call(self.lin, dict(weight=self.w.sin()), ({a},)).tanh()

{o} = grid(len({a}), {a}.dtype) * {a}.sin()
"""

# As PURE, but compilers refuse Functions with forward derivatives.
FUNCTIONS = """
{o} = Doubled.apply({a})

{o} = SavesOutput.apply({a})

{o} = Twin.apply({a}, {b})[0]
"""

# Writes to what the program itself has made: views and memory of every kind.
WRITES = """
{o} = {a}.sin().mul_(2).add_({b})

{o} = ({a} * 2).relu_()

{o} = {a}.clone()
{o}[0] = {o}[1] * 2

{o} = torch.empty_like({a})
{o}[:, :2] = {a}[:, 2:]
{o}[:, 2:] = {b}[:, :2].sin()

{o} = {a}.cos() * 2
{t} = {o}.view(-1)[::2]
{t}.mul_(2)

{o} = {a}.cos()
{o}.t()[1].mul_({b}[:, 0])

{o} = torch.zeros_like({a}).copy_({a}).sin()

{o} = {a}.clone().masked_fill_({b} > 0, 0.5)

{o} = ({a} + 1).clamp_(-1, 2).sin()

{o} = {a}.sin()
{o}.select(1, 0).zero_()

{o} = {a} + 0
{o}.narrow(1, 1, 2).add_({b}[:, :2])

{o} = {a}.clone().index_copy_(1, torch.tensor([0, 2]), {b}[:, :2].sin())

{o} = {a}.clone().scatter_add_(1, torch.zeros(len({a}), 4, dtype=torch.long), {b})

{o} = torch.zeros_like({a})
for {t} in range(3):
    {o}[:, {t}] = ({a}[:, {t}] * ({t} + 1)).sin()

{o} = {a}.sin()
{o} += {b}
{o} *= 0.5

{o} = {a}.clone().squeeze_().unsqueeze_(0).squeeze_(0)

{o} = {a}.clone().lerp_({b}, 0.25).addcmul_({a}, {b})

{t} = {a} * 2
{t}2 = {t}[:, 1:]
{t}.add_({b})
{o} = {t}2.sum(1, keepdim=True) * {t}

{t} = torch.view_as_complex({a}.clone().view(-1, 2, 2))
{t}.mul_(1j)
{o} = torch.view_as_real({t}).reshape({a}.shape)

{o} = {a}.clone()
{o}.diagonal().add_(1.5)

{o} = {a}.sin()
{o}.index_put_((torch.tensor([0, 0]), torch.tensor([1, 2])), {b}[0, :2], accumulate=True)

{t} = {a} + 1
{t}.detach().mul_(2)
{o} = {t}.sin()

{t} = [{a}.sin()]
{t}.append({t}[0].mul_({b}))
{o} = {t}[0] + {t}[1]
"""

# Tensors that a model holds, read and written: averages, counters, queues, statistics. Compilers take them.
BUFFERS = """
self.steps.add_(1)
{o} = {a} * self.steps.clamp(max=3.0)

with torch.no_grad():
    self.mean.mul_(0.9).add_({a}.detach().mean(0), alpha=0.1)
{o} = {a} - self.mean

with torch.no_grad():
    self.queue[:len({a})] = {a}
{o} = {b} + self.queue.mean(0).sin()

with torch.no_grad():
    self.queue.copy_(torch.cat([{a}.detach()[:1], self.queue[:-1]]))
{o} = {a} * self.queue[1].sin()

{o} = self.bn({a})

{o} = self.bn(self.bn({a}).sin())

self.mean.lerp_({a}.detach().mean(0), 0.1)
{o} = {a}.sin() * self.mean.exp()

self.steps += 1
{o} = {a}.cos() / self.steps

self.queue.view(-1)[::4].add_({a}.detach().mean())
{o} = {a} * self.queue[0]

{o} = {a} + self.mean
self.mean.mul_(0.5)

{t} = self.queue[1:3]
{t}.t().add_(0.25)
{o} = {a}.sin() * {t}.sum(0)
"""

RANDOM = """
{o} = F.dropout({a}.contiguous(), 0.5)

{o} = self.drop({a}.contiguous()) * {b}

{o} = {a} * torch.rand_like({a})

{o} = {a} + torch.randn(4, dtype={a}.dtype)

{o} = {a} * torch.bernoulli(torch.full_like({a}, 0.5))

{o} = {a} + torch.empty_like({a}).uniform_(0, 1)

{o} = {a}[:, torch.randperm(4)]

{o} = {a} * torch.normal({b}.detach(), 0.1)
"""

# As PURE, of modules, buffers, contexts and Python.
COMMON = """
{o} = {a} * torch.bincount({a}.detach().argmax(1), minlength=4)

{o} = {a}.sin()[{b}.detach()[:, 0].argsort()].exp().tanh()

torch.ops.remat_fuzz.bump(self.steps)
{o} = {a} * self.steps.clamp(max=4.0)

{o} = self.weighted({a}).sin()

{o} = self.parametrized({a})

{o} = self.attention({a}[None], {a}[None], {a}[None])[0][0]

with torch.autocast("cpu", torch.bfloat16):
    {o} = self.lin({a}).sin().to({a}.dtype)

with torch.autocast("cpu", enabled=False):
    {o} = ({a} @ self.w).sin()

{o} = lookup({a}.shape[1]).to({a}.dtype) * {a}

{o} = {a}.sin() if {a} is {b} else {a}.cos() * {b}
"""

# Transforms inside, which make a region run its function again.
NESTED = """
{o} = torch.func.grad(lambda {t}: self.mlp({t}).sum())({a}) * {b}

{o} = torch.func.vmap(lambda {t}: self.lin({t}).sin())({a})

{o} = torch.func.jvp(lambda {t}: {t}.sin() * {b}, ({a},), ({b},))[1]
"""

# In eager code, under `torch.func` too where nothing is batched.
LEVELS = """
{o} = {a}.sin() if float({a}.detach().sum()) > 0 else {a}.cos()

{o} = {a} * {b}.detach().sum(0).tolist()[0]

{o} = {a}.clone()
{o}[{b} > 0] = {a}[{b} > 0].sin()

{o} = {a} + {a}[{b} > 0].exp().tanh().sum()

{o} = self.gru({a}[None])[0][0]

{o} = torch.sparse.mm(self.adjacency, {a}.t().sin()).t().contiguous()

{t} = torch.empty({a}.shape, dtype={a}.dtype)
with torch.no_grad():
    torch.sin({a}, out={t})
{o} = {a} * {t}

{o} = self.spectral({a}).tanh()

with torch.inference_mode():
    {t} = {b}.sin()
{o} = {a} * {t}.clone() if not torch.is_inference_mode_enabled() else {a}.cos()

{o} = self.quantized({a}.detach().float()).to({a}.dtype) * {b}

with torch.enable_grad():
    {t} = {a} if {a}.requires_grad else {a}.detach().requires_grad_()
    {t}2 = torch.autograd.grad({t}.sin().pow(2).sum(), {t}, create_graph=True)[0]
{o} = {t}2 * {b}

{t} = {a}.sin()
{t}2 = {t}.detach()
{t}2.t_()
{o} = {t} * {t}.exp() * {t}2.t()
"""

# Under plain autograd, compilers included.
OLD = """
{o} = Old.apply({a})

{o} = Attribute.apply({a}, {b})

{o} = Partly.apply({a}, {b})[0]

{o} = torch.ops.remat_fuzz.new_like({a}) * {b}

{o} = self.renorm(torch.arange(len({a})) % 5) * {a}

{o} = torch.utils.checkpoint.checkpoint(lambda {t}: self.mlp({t}).sin(), {a}, use_reentrant=False)
"""

# As OLD; the region's function runs again.
MEMORY = """
{o} = {a} * torch.from_numpy({b}.detach().sin().numpy().copy())

{o} = {a} * {a}.detach().numpy().mean()

{o} = torch.ops.remat_fuzz.scaled({a}, 2.0)

{o} = RawFill.apply({a})

{o} = {a} * 2
{o}.detach().numpy()[...] *= 0.5

{t} = {b}.detach().clone()
{t}.map_({a}.detach(), lambda p, q: p * q + 1)
{o} = {a} * {t}
"""

# State that a second run of the function finds, or makes, as the first did.
STATE = """
{o} = {a} * torch.rand({a}.shape, generator=self.generator, dtype={a}.dtype)

torch.manual_seed(7)
{o} = F.dropout({a}.contiguous(), 0.5)

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(3)
    {t} = torch.rand_like({a})
{o} = {a} * {t} + torch.rand(1, dtype={a}.dtype)

{t} = torch.get_rng_state()
{o} = F.dropout({a}.contiguous(), 0.5)
torch.set_rng_state({t})

{o} = {a} * self.cache.setdefault(len({a}), torch.linspace(0.5, 1.5, 4, dtype={a}.dtype))

{o} = {a} * self.cache.setdefault("first", {b}.detach().mean(0).sin())

self.last = {a}.sin()
{o} = self.last * {b}

{t} = self.last
self.last = {a}.detach().mean(0)
{o} = {a} * {t}

self.noted = {a}.sin()
{o} = {b}.cos()

{o} = {a} if self.noted is None else {a} * self.noted.mean().tanh()

{t} = {a}.sin()
if {t}.requires_grad:
    {t}.register_hook(lambda g: g * 0.5)
{o} = {t}.exp().tanh()
"""

# What only eager code does.
EAGER = """
with torch.enable_grad():
    {t} = {a}.detach().requires_grad_()
    {t}2 = torch.autograd.grad(self.lin({t}).tanh().sum(), {t})[0]
{o} = {t}2 * {b}

with torch.enable_grad():
    {t} = {a} if {a}.requires_grad else {a}.detach().requires_grad_()
    {t}2 = torch.autograd.grad(self.bn({t}).sin().sum(), {t}, create_graph=True)[0]
{o} = {t}2 * {b}

with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
    {o} = ({a} * {b}).sin()

with torch.autograd.graph.save_on_cpu():
    {o} = torch.tanh({a} @ self.w)

{o} = Dirty.apply({a}.sin())

{o} = self.instance({a}.t()[None])[0].t() if len({a}) > 1 else {a}

{t} = {a}.sin()
{t}2 = torch.empty(0, dtype={a}.dtype).set_({t}.detach())
{t}2.mul_(2)
{o} = {t} * {t}

{t} = {a}.sin()
{t}2 = {t}.data
{t}2.transpose_(0, 1).mul_(0.5)
{o} = {t} * {t}

{t} = {b}.detach().sum(0)
{t}2 = torch.sparse_coo_tensor(torch.arange(4).repeat(2, 1), {t}, (4, 4))
{t}.mul_(2)
{o} = torch.sparse.mm({t}2, {a}.t()).t().contiguous()
"""

# Python state, hooks and side effects: once, in a region that runs ops again and not its function.
PYTHON = """
{o} = {a} * random.random() + np.random.rand()

self.calls += 1
{o} = {a} * self.calls

self.history.append(float({a}.detach().sum()))
{o} = {a}.sin() * len(self.history)

self.escaped.append({a}.sin() * 2)
{o} = {a}.cos()

self.factor = self.factor * 0.5 + 0.25
{o} = {a}.sin() * self.factor

{t} = {a}.sin()
if {t}.requires_grad:
    {t}.register_hook(lambda g: self.gradients.append(float(g.sum())))
{o} = {t} * {b}

{t} = {a}.detach().clone().requires_grad_()
with torch.enable_grad():
    self.lin({t}).sin().sum().backward(inputs=[{t}])
{o} = {a} * {t}.grad

{o} = {a}.sin()
{o}.retain_grad() if {o}.requires_grad else None

{t} = self.shared
{t}.append(len({a}))
{o} = {a} * len({t})
"""

# What makes a region run its function again: no Python state in the same program.
OPEN = """
{t} = {a} + 1
{t}.data.mul_(2)
{o} = {t}.sin()

{t} = {a} * 2
{t}.data = {t}.data.sin()
{o} = {t} * {b}

{o} = torch.autograd.functional.jvp(lambda {t}: {t}.sin(), {a}.detach(), {b}.detach())[1] * {a}
"""

# What a region refuses in every form.
REFUSED = """
{a}.mul_(2)
{o} = {a}.sin()
"""

FEATURES = {
    "w": "self.w = nn.Parameter(torch.randn(4, 4) / 2)",
    "scale": "self.scale = nn.Parameter(torch.rand(4) + 0.5)",
    "offset": "self.offset = nn.Parameter(torch.zeros(()))",
    "kernel": "self.kernel = nn.Parameter(torch.randn(1, 1, 3) / 2)",
    "table": "self.table = nn.Parameter(torch.randn(5, 4) / 2)",
    "lin": "self.lin = nn.Linear(4, 4)",
    "mlp": "self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))",
    "tied": "self.lin = nn.Linear(4, 4)\n"
    "self.tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())\n"
    "self.tied[0].weight = self.lin.weight",
    "bn": "self.bn = nn.BatchNorm1d(4)",
    "drop": "self.drop = nn.Dropout(0.4)",
    "steps": 'self.register_buffer("steps", torch.zeros(()))',
    "mean": 'self.register_buffer("mean", torch.full((4,), 0.5))',
    "queue": 'self.register_buffer("queue", torch.linspace(-1, 1, 32).view(8, 4))',
    "spectral": "self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))",
    "weighted": "self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
    "parametrized": "self.parametrized = parametrized(nn.Linear(4, 4))",
    "instance": "self.instance = nn.InstanceNorm1d(4, track_running_stats=True)",
    "renorm": "self.renorm = nn.Embedding(5, 4, max_norm=0.5)",
    "attention": "self.attention = nn.MultiheadAttention(4, 2, batch_first=True)",
    "gru": "self.gru = nn.GRU(4, 4, batch_first=True)",
    "adjacency": "self.adjacency = (torch.eye(4, dtype=DTYPE) + torch.ones(4, 4, dtype=DTYPE).tril())"
    ".to_sparse()",
    "quantized": "self.quantized = quantized()",
}
