"""What controller and worker must agree on about torch.

meta.py      a tensor's metadata, as data and as an interned object
naming.py    functions to names and back
template.py  calls without their refs
payload.py   objects to bytes and back: the only unpickler of the package
gradient_walk.py   gradients one by one, of real tensors
ambient.py   grad mode, autocast and the like: captured here, applied there
"""
