"""The profile of a layer: kernels by name, and sums of times and gaps."""

import types

import pytest

from experiments.bench import peaks, profile
from experiments.bench.profile import ATTENTION, COLLECTIVES, EIGHT, OURS, SIXTEEN, XLA, KernelTime, Profile


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COLLECTIVES),
        ("int8_matmul_block_mosaic_gpu_kernel", EIGHT),
        ("fp8_matmul_mosaic_gpu_kernel", EIGHT),
        ("fp8_matmul_mx_mosaic_gpu_kernel", EIGHT),
        ("nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT", EIGHT),
        ("_multiply", EIGHT),
        ("nvjet_sm90_qrtst_128x160_128x4_2x1_v_bz_TNT", EIGHT),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", SIXTEEN),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", ATTENTION),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(", ATTENTION),
        ("_quantize", OURS),
        ("_fallback", OURS),
        ("input_concatenate_fusion_2", XLA),
        ("wrapped_add_1", XLA),
        ("Memset 0", XLA),
    ],
)
def test_a_kernel_is_told_by_its_name(name, kind):
    assert profile.kind(name) == kind


def plane(name, **lines):
    def event(of):
        name, start, duration = of
        return types.SimpleNamespace(name=name, start_ns=start, duration_ns=duration)

    xla_lines = [types.SimpleNamespace(name=line, events=[event(e) for e in events]) for line, events in lines.items()]
    return types.SimpleNamespace(name=name, lines=xla_lines)


def test_kernels_are_those_of_the_streams_of_the_first_gpu():
    events = [("_quantize", 100.0, 50.0)]
    gpus = [plane(f"/device:GPU:{i}", Stream1=events, XLA_Ops=events) for i in (1, 0)]
    gpus[0].lines[0].events[0].start_ns = 0.0
    planes = [*gpus, plane("/host:CPU", Stream2=events)]
    assert list(profile.kernels(planes)) == [KernelTime("_quantize", 100.0, 150.0)]


def test_times_are_a_call_and_gaps_those_without_any_kernel():
    # Two calls. The third kernel overlaps the second; the gaps are 1,000 and 3,000 ns.
    recorded = [
        ("_quantize", 5e3, 6e3),
        ("nvjet_sm90_tst_x", 7e3, 12e3),
        ("_quantize", 8e3, 10e3),
        ("wrapped_add", 15e3, 16e3),
    ]
    profile_ = Profile(tuple(KernelTime(*kernel) for kernel in recorded[::-1]), 2)
    assert profile_.gaps == pytest.approx(2e-6)
    assert profile_.by_kind() == pytest.approx(
        {COLLECTIVES: 0, EIGHT: 0, SIXTEEN: 2.5e-6, ATTENTION: 0, OURS: 1.5e-6, XLA: 0.5e-6, "gaps": 2e-6}
    )
    names, seconds, launches = zip(*profile_.by_name(), strict=True)
    assert names == ("nvjet_sm90_tst_x", "_quantize", "wrapped_add")
    assert seconds == pytest.approx((2.5e-6, 1.5e-6, 0.5e-6))
    assert launches == (0.5, 1, 0.5)


def test_collectives_count_where_no_other_kernel_runs():
    # The first collective covers the second half of the matmul and 2 us more. The second covers a third, and no other
    # kernel. There are gaps of 1 and 3 us.
    recorded = [
        ("nvjet_sm90_tst_x", 0e3, 10e3),
        ("ncclDevKernel_AllReduce", 5e3, 12e3),
        ("ncclDevKernel_AllReduce", 13e3, 17e3),
        ("ncclDevKernel_AllGather", 14e3, 16e3),
        ("_quantize", 20e3, 21e3),
    ]
    two = Profile(tuple(KernelTime(*kernel) for kernel in recorded), 1)
    assert two.collectives == pytest.approx((6e-6, 5e-6))
    by_kind = two.by_kind()
    assert by_kind[COLLECTIVES] == pytest.approx(6e-6)
    assert by_kind["gaps"] == pytest.approx(4e-6)
    rows = profile.rows("case", {"bf16": two, "coat": two}, {})
    values = {row["metric"]: row["value"] for row in rows if row["case"] == "case" and row["impl"] == "coat"}
    assert values["all"] == pytest.approx(21e-3)  # from the first start to the last end
    assert (values[COLLECTIVES], values[profile.OVERLAPPED]) == pytest.approx((6e-3, 5e-3))


def test_rows_compare_kinds_with_bf16():
    plain = Profile((KernelTime("nvjet_sm90_tst_x", 0.0, 6e6), KernelTime("wrapped_add", 6e6, 7e6)), 1)
    ours = Profile((KernelTime("int8_matmul_mosaic", 0.0, 3e6), KernelTime("_quantize", 4e6, 5e6)), 1)
    rows = profile.rows("case", {"bf16": plain, "fast": ours}, {})
    actual = {(row["impl"], row["metric"]): (row["value"], row["ratio"]) for row in rows if row["case"] == "case"}
    assert actual["fast", EIGHT] == (pytest.approx(3), None)
    assert actual["fast", "gaps"] == (pytest.approx(1), None)
    assert actual["fast", SIXTEEN] == (0, None)
    # From the first kernel to the last.
    assert actual["fast", "all"] == (pytest.approx(5), pytest.approx(7 / 5))
    assert actual["bf16", SIXTEEN] == (pytest.approx(6), 1)
    assert ("bf16", COLLECTIVES) not in actual  # one GPU
    (longest,) = [row for row in rows if row["case"] == "case, fast: int8_matmul_mosaic"]
    assert (longest["metric"], longest["value"]) == ("1 launches", pytest.approx(3))


def test_rows_of_a_program_have_its_least_time():
    ours = Profile((KernelTime("_quantize", 4e6, 5e6),), 1)
    rows = profile.rows("model", {"bf16": ours, "fast": ours}, {"fast": {OURS: 7e-4, SIXTEEN: 0.0}})
    assert [(r["impl"], r["metric"], r["value"]) for r in rows if "peak" in r["metric"]] == [
        ("fast", f"{OURS}, at the peak", pytest.approx(0.7))
    ]
    assert [r["case"] for r in rows if r["metric"] == "1 launches"] == [
        "model, bf16: _quantize",
        "model, fast: _quantize",
    ]


PROGRAM = """
%inner (p: bf16[8,4]) -> f32[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %c = f32[8,4]{1,0} convert(%p)
  ROOT %e = f32[8,4]{1,0} exponential(%c)
}

%around (q: u8[64,32]) -> u8[64,32] {
  %q = u8[64,32]{1,0} parameter(0)
  ROOT %k2 = (u8[64,32]{1,0}, f32[1]{0}) custom-call(%q, %q), KERNEL quantize/triton_kernel_call"}
}

%body (t: bf16[8,4]) -> f32[8,4] {
  %t = bf16[8,4]{1,0} parameter(0)
  ROOT %f = f32[8,4]{1,0} fusion(%t), kind=kLoop, calls=%inner
}

ENTRY %main (x: f8e4m3fn[16,64], y: f8e5m2[32,64], z: bf16[3,8,64], w: bf16[3,64,4], t: bf16[8,4]) -> f32[8,4] {
  %x = f8e4m3fn[16,64]{1,0} parameter(0)
  %y = f8e5m2[32,64]{1,0} parameter(1)
  %z = bf16[3,8,64]{2,1,0} parameter(2)
  %w = bf16[3,64,4]{2,1,0} parameter(3)
  %t = bf16[8,4]{1,0} parameter(4)
  %eight = (f32[16,32]{1,0}, s8[4194304]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul$f8"
  %batch = (bf16[3,8,4]{2,1,0}, s8[99]{0}) custom-call(%z, %w), custom_call_target="__cublas$gemm"
  %requantize = (u8[999,999]{1,0}) custom-call(%x), KERNEL requantize/triton_kernel_call"}
  %u = u8[64,32]{1,0} bitcast(%x)
  %dynamic = u8[64,32]{1,0} fusion(%u), kind=kCustom, calls=%around
  ROOT %loop = f32[8,4]{1,0} while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
""".replace("KERNEL ", 'custom_call_target="__gpu$xla.gpu.ptx", metadata={op_name="step/')


def test_the_least_time_is_that_of_operations_and_bytes():
    for device_kind, bandwidth in (("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H200", 4.8e12)):
        assert peaks.least(PROGRAM, peaks.bandwidth(device_kind)) == pytest.approx({
            EIGHT: 2 * 16 * 32 * 64 / 1979e12,
            SIXTEEN: 2 * 3 * 8 * 4 * 64 / 989.5e12,
            OURS: (2 * 64 * 32 + 4) / bandwidth,  # an operand that is passed twice is read once
            XLA: 5 * (8 * 4) * (2 + 4) / bandwidth,
        })  # fmt: skip
