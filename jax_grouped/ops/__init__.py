"""Operations on groups, with their derivatives."""
