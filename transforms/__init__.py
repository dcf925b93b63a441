"""Policy-free machinery: transforms from function to function over torch and optree.

Import name `remat.transforms` (the folder is linked into the package).
"""

from remat.transforms.grad import grad as grad
from remat.transforms.grad import value_and_grad as value_and_grad
