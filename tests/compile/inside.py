"""What tests of compiled code read of the inside, behind one door: graphs before they run, code for cards."""

from remat._dynamo.region import describe  # how policies are written into graphs
from remat._torch import compiled_for_graphs  # the graph of forward and backward
from remat.gpu.inductor import lowered  # code as Inductor writes it
from remat.gpu.inductor.attention import attention_of_gpus  # kernels that cards take
from remat.plan.policy import BudgetPolicy  # plans that are made while code is compiled
from remat.transforms.compat import fx, inductor  # marks and lowerings of torch's
from remat.transforms.compat.autograd import in_transform  # whether a level of torch.func is left open
from remat.transforms.compiled.barrier import fence  # fences
