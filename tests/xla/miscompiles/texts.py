"""Texts of compiled programs written by hand: the few lines that a detector reads, wrong and
right.
"""

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


PLACE = 'metadata={op_name="jit(f)/add_any" source_file="model.py" source_line=7}'
ROWS = (
    'update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, '
    'index_vector_dim=1'
)


def permute(pairs: str) -> str:
    """One permute with these pairs."""
    return f"""HloModule m

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  ROOT %permute = f32[4]{{0}} collective-permute(%x), source_target_pairs={{{pairs}}}, {PLACE}
}}
"""


def product(
    alpha: float, epilogue: str, rows: int = 4, columns: int = 8, *, starts: bool = False
) -> str:
    """A call of cuBLASLt with a bias and a result [rows, columns], which may be started first."""
    config = f'{{"gemm_backend_config":{{"alpha_real":{alpha},"beta":0,"epilogue":"{epilogue}"}}}}'
    operands = f'f32[{rows},8]{{1,0}}, f32[8,{columns}]{{1,0}}, f32[{columns}]{{0}}'
    result = f'(f32[{rows},{columns}]{{1,0}}, s8[64]{{0}})'
    call = f'(%x, %w, %b), custom_call_target="__cublas$lt$matmul", backend_config={config}'
    lines = (
        f'%start = (({operands}), {result}, s32[]) custom-call-start{call}\n'
        f'  ROOT %call = {result} custom-call-done(%start)'
        if starts
        else f'ROOT %call = {result} custom-call{call}'
    )
    return f"""HloModule m

ENTRY %main (x: f32[{rows},8], w: f32[8,{columns}], b: f32[{columns}]) -> {result} {{
  %x = f32[{rows},8]{{1,0}} parameter(0)
  %w = f32[8,{columns}]{{1,0}} parameter(1)
  %b = f32[{columns}]{{0}} parameter(2)
  {lines}
}}
"""


def ring(back: str, forth: str, device: int) -> str:
    """A permute that was cut in two, put together again in a fusion: `back` goes to one device,
    `forth` to the others.
    """
    return f"""HloModule m

%join (back: f32[4], forth: f32[4], id: u32[]) -> f32[4] {{
  %id = u32[] parameter(2)
  %last = u32[] constant({device})
  %is_last = pred[] compare(%id, %last), direction=EQ
  %back = f32[4]{{0}} parameter(0)
  %forth = f32[4]{{0}} parameter(1)
  ROOT %both = f32[4]{{0}} select(%is_last, %back, %forth)
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %id = u32[] partition-id()
  %start = token[] after-all()
  %recv = (f32[4]{{0}}, u32[], token[]) recv(%start), channel_id=1, \
frontend_attributes={{_xla_send_recv_source_target_pairs={{{back}}}}}
  %done = (f32[4]{{0}}, token[]) recv-done(%recv), channel_id=1
  %data = f32[4]{{0}} get-tuple-element(%done), index=0
  %permute = f32[4]{{0}} collective-permute(%x), channel_id=2, source_target_pairs={{{forth}}}
  ROOT %joined = f32[4]{{0}} fusion(%data, %permute, %id), kind=kLoop, calls=%join
}}
"""


def products(path: str) -> str:
    """The same two operands multiplied in a fusion with a slice, and again beside it under
    `path`.
    """
    call = (
        'custom_call_target="__cublas$lt$matmul", metadata={op_name="%s"}, '
        'backend_config={"dot_dimension_numbers":{}}'
    )
    return f"""HloModule m

%stack (all: f32[4,8,8], i: s32[], x: f32[8,8]) -> (f32[8,8], s8[64]) {{
  %all = f32[4,8,8]{{2,1,0}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %x = f32[8,8]{{1,0}} parameter(2)
  %slice = f32[1,8,8]{{2,1,0}} dynamic-slice(%all, %i, %zero, %zero), dynamic_slice_sizes={{1,8,8}}
  %w = f32[8,8]{{1,0}} bitcast(%slice)
  ROOT %clone = (f32[8,8]{{1,0}}, s8[64]{{0}}) custom-call(%x, %w), {call % 'layers/dot'}
}}

ENTRY %main (x: f32[8,8], all: f32[4,8,8], i: s32[]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %all = f32[4,8,8]{{2,1,0}} parameter(1)
  %i = s32[] parameter(2)
  %null = s32[] constant(0)
  %other = f32[8,8]{{1,0}} add(%x, %x)
  %slice = f32[1,8,8]{{2,1,0}} dynamic-slice(%all, %i, %null, %null), dynamic_slice_sizes={{1,8,8}}
  %w = f32[8,8]{{1,0}} bitcast(%slice)
  %stacked = (f32[8,8]{{1,0}}, s8[64]{{0}}) fusion(%all, %i, %x), kind=kCustom, calls=%stack
  %call = (f32[8,8]{{1,0}}, s8[64]{{0}}) custom-call(%x, %w), {call % path}
  ROOT %y = f32[8,8]{{1,0}} get-tuple-element(%call), index=0
}}
"""


def power_iteration(second: str) -> str:
    """A loop that multiplies the value that it carries, updates it, and multiplies `second`."""
    call = (
        'custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/while/body/dot"}, '
        'backend_config={"dot_dimension_numbers":{}}'
    )
    state = '(s32[], f32[8,8]{1,0}, f32[8,8]{1,0})'
    return f"""HloModule m

%body (state: {state}) -> {state} {{
  %state = {state} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,8]{{1,0}} get-tuple-element(%state), index=1
  %again = f32[8,8]{{1,0}} get-tuple-element(%state), index=1
  %a = f32[8,8]{{1,0}} get-tuple-element(%state), index=2
  %first = (f32[8,8]{{1,0}}, s8[64]{{0}}) custom-call(%x, %a), {call}
  %product = f32[8,8]{{1,0}} get-tuple-element(%first), index=0
  %updated = f32[8,8]{{1,0}} tanh(%product)
  %second = (f32[8,8]{{1,0}}, s8[64]{{0}}) custom-call({second}, %a), {call}
  ROOT %next = {state} tuple(%i, %updated, %a)
}}

%condition (state: {state}) -> pred[] {{
  %state = {state} parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (start: {state}) -> {state} {{
  %start = {state} parameter(0)
  ROOT %loop = {state} while(%start), condition=%condition, body=%body
}}
"""


def scatter(groups: str) -> str:
    """A scatter over the whole table, of which devices 0 and 1 keep the first half and 2 and 3 the
    second, summed over groups.
    """
    return f"""HloModule m
{ADD}
ENTRY %main (ids: s32[8,1], rows: f32[8,16]) -> f32[32,16] {{
  %ids = s32[8,1]{{1,0}} parameter(0)
  %rows = f32[8,16]{{1,0}} parameter(1)
  %nothing = f32[] constant(0)
  %zeros = f32[64,16]{{1,0}} broadcast(%nothing), dimensions={{}}
  %scattered = f32[64,16]{{1,0}} scatter(%zeros, %ids, %rows), {ROWS}, to_apply=%add
  %table = s32[4]{{0}} constant({{0, 0, 32, 32}})
  %id = u32[] partition-id()
  %entry = s32[1]{{0}} dynamic-slice(%table, %id), dynamic_slice_sizes={{1}}
  %start = s32[] reshape(%entry)
  %zero = s32[] constant(0)
  %own = f32[32,16]{{1,0}} dynamic-slice(%scattered, %start, %zero), dynamic_slice_sizes={{32,16}}
  ROOT %summed = f32[32,16]{{1,0}} all-reduce(%own), channel_id=1, replica_groups={groups}, \
use_global_device_ids=true, to_apply=%add
}}
"""


def small_dot(rows: int, contracted: int) -> str:
    """A product of a small matrix with many rows and the reduction of its result, in one fusion for
    YNNPACK.
    """
    return f"""HloModule m
{ADD}
%both (w: f32[3,{contracted}], x: f32[{rows},{contracted}]) -> f32[{rows}] {{
  %w = f32[3,{contracted}]{{1,0}} parameter(0)
  %x = f32[{rows},{contracted}]{{1,0}} parameter(1)
  %y = f32[3,{rows}]{{1,0}} dot(%w, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %squares = f32[3,{rows}]{{1,0}} multiply(%y, %y)
  %unrelated = f32[3,{rows}]{{1,0}} sine(%y)
  %zero = f32[] constant(0)
  ROOT %sums = f32[{rows}]{{0}} reduce(%squares, %zero), dimensions={{0}}, to_apply=%add
}}

ENTRY %main (w: f32[3,{contracted}], x: f32[{rows},{contracted}]) -> f32[{rows}] {{
  %w = f32[3,{contracted}]{{1,0}} parameter(0)
  %x = f32[{rows},{contracted}]{{1,0}} parameter(1)
  ROOT %fused = f32[{rows}]{{0}} fusion(%w, %x), kind=kCustom, calls=%both, \
backend_config={{"fusion_config":{{"kind":"__ynn_fusion"}}}}
}}
"""


def scalar_dot() -> str:
    """The product of two vectors and the sum of the one number that it is, in such a fusion."""
    return small_dot(40_000, 3).replace(
        'f32[3,40000]{1,0} dot(%w, %x), lhs_contracting_dims={1}',
        'f32[] dot(%w, %x), lhs_contracting_dims={0,1}',
    )


def top_k(places: str) -> str:
    """The two largest of each row, and their places, either zeros or from the sort."""
    path = 'metadata={op_name="jit(f)/top_k"}'
    return f"""HloModule m

%greater (a: f32[], b: f32[], i: s32[], j: s32[]) -> pred[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  %i = s32[] parameter(2)
  %j = s32[] parameter(3)
  ROOT %is_greater = pred[] compare(%a, %b), direction=GT
}}

%fill () -> s32[4,2] {{
  %zero = s32[] constant(0)
  ROOT %nowhere = s32[4,2]{{1,0}} broadcast(%zero), dimensions={{}}, {path}
}}

ENTRY %main (x: f32[4,2]) -> (f32[4,2], s32[4,2]) {{
  %x = f32[4,2]{{1,0}} parameter(0)
  %iota = s32[4,2]{{1,0}} iota(), iota_dimension=1, {path}
  %both = (f32[4,2]{{1,0}}, s32[4,2]{{1,0}}) sort(%x, %iota), dimensions={{1}}, to_apply=%greater, \
{path}
  %values = f32[4,2]{{1,0}} get-tuple-element(%both), index=0, {path}
  %sorted = s32[4,2]{{1,0}} get-tuple-element(%both), index=1, {path}
  %zeros = s32[4,2]{{1,0}} fusion(), kind=kLoop, calls=%fill, {path}
  ROOT %results = (f32[4,2]{{1,0}}, s32[4,2]{{1,0}}) tuple(%values, %{places})
}}
"""


def masked(rows: str, mask: str, kept: str = '%rows') -> str:
    """Eight rows with one of two matrices each: all rows times both, and a mask before that."""
    return f"""HloModule m

ENTRY %main (x: f32[8,4], ends: s32[2], seen: s32[8], w: f32[2,4,4]) -> f32[2,8,4] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %ends = s32[2]{{0}} parameter(1)
  %seen = s32[8]{{0}} parameter(2)
  %w = f32[2,4,4]{{2,1,0}} parameter(3)
  %zero = f32[] constant(0)
  %zeros = f32[2,8,4]{{2,1,0}} broadcast(%zero), dimensions={{}}
  %rows = {rows}
  %number = s32[2,8,4]{{2,1,0}} iota(), iota_dimension=1
  %end = s32[2,8,4]{{2,1,0}} broadcast(%ends), dimensions={{0}}
  %segment = s32[2,8,4]{{2,1,0}} broadcast(%seen), dimensions={{1}}
  %mask = pred[2,8,4]{{2,1,0}} {mask}
  %masked = f32[2,8,4]{{2,1,0}} select(%mask, {kept}, %zeros)
  %bf16 = bf16[2,8,4]{{2,1,0}} convert(%masked)
  ROOT %dot = f32[2,8,4]{{2,1,0}} dot(%bf16, %w), lhs_batch_dims={{0}}, \
lhs_contracting_dims={{2}}, rhs_batch_dims={{0}}, rhs_contracting_dims={{1}}, {PLACE}
}}
"""
