"""Policy-free machinery: transforms from function to function over torch and optree.

Import name `remat.transforms` (the folder is linked into the package).
"""
