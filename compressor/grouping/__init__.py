"""The mathematics that strategies share: which experts are alike, and how a group becomes one."""
