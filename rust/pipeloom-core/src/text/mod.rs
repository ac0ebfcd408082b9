pub(crate) const _X: u8 = 0;
