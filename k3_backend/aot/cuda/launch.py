"""Load cubins and launch them: the only host code that runs on a GPU machine for a candidate's kernels.

`CudaOp` holds one artifact's loaded kernels; `bind` checks a call against the op's interface, evaluates the
descriptor's rules for its sizes and packs every launch once; `BoundCall.launch` enqueues them on a stream, so that it
can be captured in a CUDA graph. Parameter offsets and sizes are compared with what the driver reads off the cubin, and
nothing of the candidate runs on the host. Needs torch and cuda-bindings; the primary context must be current (any torch
CUDA call makes it so).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from k3_backend.aot.arguments import TORCH_DTYPES, BindError, call_sizes, check_attrs, check_tensors
from k3_backend.aot.cuda.descriptor import POINTERS, Descriptor, LaunchSpec, ParameterSpec, VariantSpec
from k3_backend.aot.cuda.expression import evaluate
from k3_backend.aot.manifest import ArtifactError
from k3_backend.errors import BackendError
from k3_backend.geometry import Geometry
from k3_backend.ops.interface import OpSpec

__all__ = ["BoundCall", "CudaError", "CudaOp"]

_STATIC_SHARED_LIMIT = 48 * 1024
"""Bytes of shared memory that need no attribute on the kernel."""


class CudaError(BackendError):
    """The driver refused a call."""


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call.

    Raises:
        CudaError: the call did not succeed; named after `what` was being done.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        text = name.decode() if isinstance(name, bytes) else str(status)
        raise CudaError(text, where=what, expected="CUDA_SUCCESS", next="fasttrack doctor")
    return values[0] if len(values) == 1 else tuple(values)


def encode_tensor_map(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A TMA descriptor as 128 bytes of device memory (see `contract.TensorMap`).

    Args:
        tensor: contiguous, 16-byte aligned, with rows of a multiple of 16 bytes.
        rows: of a box.
        columns: of a box, in elements.

    Raises:
        CudaError: the driver refuses the combination.
    """
    kinds = {
        torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float32: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        torch.uint8: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
    width = tensor.shape[-1]
    number = driver.cuuint32_t
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            kinds[tensor.dtype], 2, tensor.data_ptr(),
            [driver.cuuint64_t(width), driver.cuuint64_t(tensor.numel() // width)],
            [driver.cuuint64_t(width * tensor.element_size())],
            [number(columns), number(rows)], [number(1), number(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"tensor map of {list(tensor.shape)} in boxes of {rows} x {columns}",
    )  # fmt: skip
    words = struct.pack("<16Q", *(int(word) for word in encoded.opaque))
    return torch.frombuffer(bytearray(words), dtype=torch.uint8).cuda()


class CudaOp:
    """The kernels of one artifact, loaded on the current device.

    Args:
        folder: artifact folder with `cuda.json` and the cubins it names.
        spec: interface of the op, from the trusted side.
        geometry: must be the one that the artifact was built for.

    Raises:
        ArtifactError: the descriptor does not fit, or the driver reads other parameters off a cubin.
        CudaError: the driver refuses an image.
    """

    def __init__(self, folder: Path, spec: OpSpec, geometry: Geometry) -> None:
        self.spec = spec
        self.geometry = geometry
        self.descriptor = Descriptor.read(folder, spec)
        if self.descriptor.geometry != geometry.name:
            raise ArtifactError(
                f"built for geometry {self.descriptor.geometry}", where=str(folder), expected=geometry.name,
                next=f"fasttrack build --arch {self.descriptor.arch} --op {spec.name}",
            )  # fmt: skip
        torch.cuda.current_stream()  # makes the primary context current
        self.multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._libraries: list[Any] = []
        self._kernels: dict[str, Any] = {}
        self._rooms: dict[str, int] = {}
        for image in self.descriptor.images():
            self._load(folder / image)
        for variant in self.descriptor.variants:
            for launch in variant.launches:
                self._cross_check(launch)

    def _load(self, path: Path) -> None:
        library = check(
            driver.cuLibraryLoadData(path.read_bytes(), [], [], 0, [], [], 0), f"cuLibraryLoadData {path.name[:16]}"
        )
        self._libraries.append(library)
        count = check(driver.cuLibraryGetKernelCount(library), "cuLibraryGetKernelCount")
        kernels = check(driver.cuLibraryEnumerateKernels(count, library), "cuLibraryEnumerateKernels")
        if count != 1:
            raise ArtifactError(
                f"{count} kernels", where=path.name, expected="one kernel per image", next="build again"
            )
        self._kernels[path.name] = kernels[0]

    def _cross_check(self, launch: LaunchSpec) -> None:
        """Compare name and parameter table with the driver's reading, and raise the shared memory limit if needed."""
        kernel = self._kernels[launch.image]
        name = check(driver.cuKernelGetName(kernel), "cuKernelGetName")
        found = name.decode() if isinstance(name, bytes) else str(name)
        seen = []
        for index in range(len(launch.parameters) + 1):
            result = driver.cuKernelGetParamInfo(kernel, index)
            if result[0] != driver.CUresult.CUDA_SUCCESS:
                break
            seen.append((int(result[1]), int(result[2])))
        wanted = [(p.offset, p.size) for p in launch.parameters]
        if found != launch.entry or seen != wanted:
            raise ArtifactError(
                f"kernel {found} has parameters (offset, size) {seen}", where=f"{self.spec.name}/{launch.name}",
                expected=f"{launch.entry} with {wanted}", next="build the artifact again",
            )  # fmt: skip
        if launch.shared + launch.static_shared > _STATIC_SHARED_LIMIT:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device = check(driver.cuDeviceGet(torch.cuda.current_device()), "cuDeviceGet")
            check(driver.cuKernelSetAttribute(attribute, launch.shared, kernel, device), "cuKernelSetAttribute")

    def bind(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        attrs: Mapping[str, int | float],
        tunables: Mapping[str, int],
        workspaces: Mapping[str, torch.Tensor] | None = None,
    ) -> BoundCall:
        """Check and pack one call.

        Args:
            tensors: by interface name, on the current device; optional ones may be None.
            attrs: by interface name.
            tunables: the schedule's values for this call.
            workspaces: scratch by name; allocated here where absent.

        Raises:
            BindError: an argument does not fit, no variant was built for the call, or one of its conditions is false.
        """
        rows = self._rows(tensors)
        bound = check_tensors(self.spec, self.geometry, tensors, attrs, rows, device="cuda")
        numbers = dict(zip((a.name for a in self.spec.attrs), check_attrs(self.spec, attrs), strict=True))
        sizes = call_sizes(self.spec, self.geometry, tensors)
        sizes |= {name: value for name, value in numbers.items() if isinstance(value, int)}
        sizes |= {"M": rows, "sms": self.multiprocessors}
        sizes |= dict(tunables)
        variant = self._variant(sizes)
        scratch = self._scratch(variant, sizes, workspaces or {})
        pointers = {t.name: (0 if x is None else x.data_ptr()) for t, x in zip(self.spec.tensors, bound, strict=True)}
        pointers |= {name: x.data_ptr() for name, x in scratch.items()}
        maps = self._maps(variant, {t.name: x for t, x in zip(self.spec.tensors, bound, strict=True)})
        pointers |= {name: x.data_ptr() for name, x in maps.items()}
        packed = [self._pack(launch, sizes, numbers, pointers) for launch in variant.launches]
        return BoundCall(packed, [*(t for t in bound if t is not None), *maps.values()], scratch, variant)

    def _maps(self, variant: VariantSpec, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """TMA descriptors of a call, in device memory, by parameter name."""
        maps: dict[str, torch.Tensor] = {}
        for launch in variant.launches:
            for parameter in launch.parameters:
                if parameter.kind != "map" or parameter.name in maps:
                    continue
                tensor = tensors.get(parameter.tensor or "")
                if tensor is None or parameter.box is None:
                    raise BindError("is absent", op=self.spec.name, argument=parameter.name, expected="a tensor")
                maps[parameter.name] = encode_tensor_map(tensor, *parameter.box)
        return maps

    def _rows(self, tensors: Mapping[str, torch.Tensor | None]) -> int:
        for spec in self.spec.tensors:
            tensor = tensors.get(spec.name)
            if tensor is not None and "M" in spec.dims and len(spec.dims) == tensor.dim():
                return int(tensor.shape[spec.dims.index("M")])
        raise BindError("no tensor tells the rows M", op=self.spec.name, argument="M", expected="a [M, ...] tensor")

    def _variant(self, sizes: Mapping[str, int]) -> VariantSpec:
        wanted = {name: sizes[name] for name in (*self.descriptor.tunables, *self.descriptor.specialised)}
        variant = self.descriptor.variant(wanted)
        if variant is None:
            raise BindError(f"nothing built for {wanted}", op=self.spec.name, argument="choices", expected="a variant")
        for condition in variant.requires:
            if not evaluate(condition, sizes):
                raise BindError(f"not {condition}", op=self.spec.name, argument="sizes", expected=condition)
        return variant

    def _scratch(
        self, variant: VariantSpec, sizes: Mapping[str, int], given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        scratch = {}
        for workspace in variant.workspaces:
            elements = evaluate(workspace.elements, sizes)
            dtype = TORCH_DTYPES[workspace.dtype]  # type: ignore[index]
            tensor = given.get(workspace.name)
            if tensor is None:
                make = torch.zeros if workspace.zeroed else torch.empty
                tensor = make(max(1, elements), dtype=dtype, device="cuda")
            elif tensor.numel() < elements or tensor.dtype != dtype:
                raise BindError(
                    f"{tensor.dtype} [{tensor.numel()}]", op=self.spec.name, argument=workspace.name,
                    expected=f"{dtype} [{elements}]",
                )  # fmt: skip
            scratch[workspace.name] = tensor
        return scratch

    def _pack(
        self,
        launch: LaunchSpec,
        sizes: Mapping[str, int],
        numbers: Mapping[str, int | float],
        pointers: Mapping[str, int],
    ) -> _Packed:
        values: list[Any] = []
        for parameter in launch.parameters:
            values.append(_value(parameter, sizes, numbers, pointers, self.spec.name))
        if launch.cluster > 1:
            sizes = {**sizes, "clusters": self._room(launch)}
        grid = [evaluate(extent, sizes) for extent in launch.grid]
        if min(grid) < 1:
            raise BindError(f"grid {grid}", op=self.spec.name, argument=launch.name, expected="a positive grid")
        return _Packed(self._kernels[launch.image], launch, grid, values)

    def _room(self, launch: LaunchSpec) -> int:
        """Clusters of a launch that the device holds at once: its multiprocessors come in groups of unequal size."""
        if launch.image not in self._rooms:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = launch.cluster, self.multiprocessors, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
            config.sharedMemBytes = launch.shared
            config.attrs, config.numAttrs = [_cluster_attribute(launch.cluster)], 1
            function = driver.CUfunction(int(self._kernels[launch.image]))
            self._rooms[launch.image] = int(
                check(driver.cuOccupancyMaxActiveClusters(function, config), f"clusters of {launch.name}")
            )
        return self._rooms[launch.image]


def _value(
    parameter: ParameterSpec,
    sizes: Mapping[str, int],
    numbers: Mapping[str, int | float],
    pointers: Mapping[str, int],
    op: str,
) -> Any:
    if parameter.kind in POINTERS:
        return ctypes.c_uint64(pointers[parameter.name])
    if parameter.kind == "f32":
        return ctypes.c_float(float(numbers[parameter.name]))
    if parameter.expression is not None:
        value = evaluate(parameter.expression, sizes)
    elif parameter.name in sizes:
        value = sizes[parameter.name]
    else:
        raise BindError("has no value", op=op, argument=parameter.name, expected="a size or attribute of the call")
    if not -(1 << 31) <= value < 1 << 31:
        raise BindError(f"is {value}", op=op, argument=parameter.name, expected="a 32-bit integer")
    return ctypes.c_int32(value)


def _cluster_attribute(blocks: int) -> Any:
    """Blocks along x that form a cluster."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = blocks, 1, 1
    return attribute


class _Packed:
    """One launch with its packed arguments; the driver copies them at every launch."""

    def __init__(self, kernel: Any, launch: LaunchSpec, grid: list[int], values: list[Any]) -> None:
        self.name = launch.name
        self.grid = grid
        self._function = driver.CUfunction(int(kernel))
        self._values = values
        self._pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared
        attributes = []
        if launch.cluster > 1:
            attributes.append(_cluster_attribute(launch.cluster))
        if launch.pdl:
            dependent = driver.CUlaunchAttribute()
            dependent.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            dependent.value.programmaticStreamSerializationAllowed = 1
            attributes.append(dependent)
        if launch.urgent:
            priority = driver.CUlaunchAttribute()
            priority.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
            _, priority.value.priority = check(driver.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange")
            attributes.append(priority)
        if launch.carveout is not None:
            carveout = driver.CUlaunchAttribute()
            carveout.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            carveout.value.sharedMemCarveout = launch.carveout
            attributes.append(carveout)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self._config = config

    def enqueue(self, stream: int) -> None:
        self._config.hStream = driver.CUstream(stream)
        check(
            driver.cuLaunchKernelEx(self._config, self._function, ctypes.addressof(self._pointers), 0),
            f"launch of {self.name}, grid {self.grid}",
        )


@dataclass
class BoundCall:
    """One call, ready to be enqueued any number of times; keeps its tensors alive."""

    packed: list[_Packed]
    tensors: list[torch.Tensor]
    workspaces: dict[str, torch.Tensor]
    variant: VariantSpec

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Enqueue all launches on a stream (default: torch's current one); capturable."""
        handle = (stream or torch.cuda.current_stream()).cuda_stream
        for launch in self.packed:
            launch.enqueue(handle)
