//! Index types. Each index of the domain has its own type, so that a stage can't be passed for a
//! rank; each is a `u32`, as in the columns that leave the core.

use std::fmt;

macro_rules! index_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            /// The value as a `usize`, for the moment of indexing.
            #[inline]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index_type!(
    /// One of the `pp` pipeline-parallel processes, `0..pp`.
    Rank
);
index_type!(
    /// One of a rank's model pieces (`vp_stage`), `0..vp`.
    Chunk
);
index_type!(
    /// A global virtual stage, in the order in which activations flow. With two replicas the
    /// second one's stages follow the first one's.
    Stage
);
index_type!(
    /// What one op works on: a microbatch, or one piece of it when sequences are cut.
    /// Unit `u` is piece `u % num_seq_pieces` of microbatch `u / num_seq_pieces`.
    Unit
);
