"""One of two processes that load models together and export them; run by `test_processes`.

Arguments: folder to export to, addresses of golden models with PROCESS for the process's number.
"""

import sys
from pathlib import Path

import golden_models
import jax
import numpy as np

from bagrpo import distributed
from bagrpo.config import MeshConfig
from bagrpo.sharding import make_mesh
from bagrpo.weights.export import export
from bagrpo.weights.load import load

out, *addresses = sys.argv[1:]
distributed.initialize()
for address in addresses:
    address = address.replace("PROCESS", str(jax.process_index()))
    arch, params = load(address, make_mesh(MeshConfig(fsdp=8)))
    name = address.rsplit("/", 1)[1]
    source = golden_models.GOLDEN / name
    want = golden_models.parameters(golden_models.config(name), golden_models.tensors(source))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        key = "/".join(part.key for part in path)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[key][shard.index], err_msg=key)
    export(params, arch, Path(out, name), source=str(source))
try:
    export(params, arch, Path(out, name), source=str(source))
except ValueError:
    pass
else:
    raise AssertionError("a used folder must be refused on every process")
distributed.finish()
