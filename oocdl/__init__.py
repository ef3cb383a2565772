"""oocdl: train neural networks that do not fit in memory, exactly.

>>> import oocdl
>>> run = oocdl.fit("unet.onnx", "brain.zarr", memory="2GiB")  # doctest: +SKIP

The public names stand in ``__init__.pyi``, where editors find them; each is loaded when it is first used.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
