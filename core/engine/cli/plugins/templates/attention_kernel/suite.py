from engine.cli.plugins.templates.attention_kernel.plugin import MineKernel, MineKernelConfig
from engine.contracts.provider import BuildContext
from engine.testing.attention_kernel import AttentionKernelConformance


class TestMineKernel(AttentionKernelConformance):
    """What the core relies on. One that is capturable or native inherits the suite of that, too."""

    capabilities = MineKernel.capabilities
    device = "cpu"
    """``cuda`` for kernels of a GPU."""

    def make(self, context: BuildContext) -> MineKernel:
        return MineKernel(MineKernelConfig(), context)
