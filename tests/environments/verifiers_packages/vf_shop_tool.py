"""The tool server of vf_shop."""

from __future__ import annotations

import verifiers.v1 as vf


class ShopToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, count: int) -> str:
        """Return the price of this many apples."""
        return str(3 * count)


if __name__ == "__main__":
    ShopToolset.run()
