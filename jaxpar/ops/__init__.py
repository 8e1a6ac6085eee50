"""Operations that know a rank's own heads: attention."""
