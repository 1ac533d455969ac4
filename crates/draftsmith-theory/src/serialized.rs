//! Serde implementations for types that check their values.

/// Deserialises a struct from its fields through `new`, which checks them.
macro_rules! deserialize_by_new {
    ($Type:ident { $($field:ident: $Field:ty),+ }) => {
        impl<'de> serde::Deserialize<'de> for $Type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                #[derive(serde::Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Fields {
                    $($field: $Field),+
                }
                let Fields { $($field),+ } = <Fields as serde::Deserialize>::deserialize(deserializer)?;
                Self::new($($field),+).map_err(serde::de::Error::custom)
            }
        }
    };
}

/// Serialises a type as the string that its `Display` writes. The string is read by the function
/// that follows the type, or else by `FromStr`.
macro_rules! serialize_as_string {
    ($Type:ty) => {
        serialize_as_string!($Type, str::parse);
    };
    ($Type:ty, $read:path) => {
        impl serde::Serialize for $Type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $Type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(deserializer)?;
                $read(&text).map_err(serde::de::Error::custom)
            }
        }
    };
}

pub(crate) use deserialize_by_new;
pub(crate) use serialize_as_string;
