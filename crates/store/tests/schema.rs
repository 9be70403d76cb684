//! The whole schema in one place (`schema.sql`), kept equal to what the migrations make; and the list of
//! embedded migrations, kept equal to the folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Db, DbOptions, migrate};
use tidemark_testkit::pg::{TestDb, server_binaries};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A dump without what differs between machines: comments, settings, owners, grants.
fn normalised(dump: &str) -> String {
    let mut text = String::new();
    let mut blank = true;
    for line in dump.lines() {
        let noise = ["--", "SET ", "SELECT pg_catalog.set_config", "\\restrict", "\\unrestrict"];
        if noise.iter().any(|start| line.starts_with(start)) {
            continue;
        }
        if line.is_empty() && blank {
            continue;
        }
        blank = line.is_empty();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.trim_end().to_owned() + "\n"
}

#[tokio::test]
async fn the_committed_schema_is_what_the_migrations_make() {
    let test = TestDb::empty().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    migrate::run(&db).await.expect("migrates");
    let bin = server_binaries().expect("Postgres");
    let dump = Command::new(bin.join("pg_dump"))
        .args(["--schema-only", "--no-owner", "--no-privileges", &test.url])
        .output()
        .expect("pg_dump runs");
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    let version = Command::new(bin.join("pg_dump")).arg("--version").output().expect("pg_dump runs");
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let major = version
        .split_whitespace()
        .find_map(|word| word.split('.').next()?.parse::<u32>().ok())
        .expect("a version");
    let header = format!("-- Made by `make bless` with pg_dump {major}. Read it; change the migrations.\n\n");
    let made = header.clone() + &normalised(&String::from_utf8_lossy(&dump.stdout));
    let path = here("schema.sql");
    if std::env::var_os("TIDEMARK_BLESS").is_some() {
        std::fs::write(&path, &made).expect("writes");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    // Another major version words the same schema in another way; then there is nothing to compare.
    if !committed.is_empty() && !committed.starts_with(&header) {
        eprintln!("not compared: schema.sql was made with another pg_dump than {major}");
        return;
    }
    if made != committed {
        let differs = made.lines().zip(committed.lines()).find(|(made, committed)| made != committed);
        panic!(
            "crates/store/schema.sql is not what the migrations make (run `make bless`); first difference: {differs:?}"
        );
    }
}

#[test]
fn every_migration_of_the_folder_is_embedded_in_order() {
    let mut files: Vec<String> = std::fs::read_dir(here("migrations"))
        .expect("a folder")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().trim_end_matches(".sql").to_owned())
        .collect();
    files.sort();
    let embedded: Vec<&str> = migrate::MIGRATIONS.iter().map(|migration| migration.name).collect();
    assert_eq!(embedded, files);
}

#[tokio::test]
async fn migrating_twice_and_at_once_is_migrating_once() {
    let test = TestDb::empty().await.expect("a database");
    let open =
        || Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    let (one, two) = (open(), open());
    let (left, right) = tokio::join!(migrate::run(&one), migrate::run(&two));
    let (left, right) = (left.expect("migrates"), right.expect("migrates"));
    assert_eq!(left.now.len() + right.now.len(), migrate::MIGRATIONS.len());
    let again = migrate::run(&one).await.expect("nothing to do");
    assert_eq!((again.now.len(), again.before), (0, migrate::MIGRATIONS.len()));
}

#[tokio::test]
async fn a_newer_or_edited_database_is_refused() {
    let test = TestDb::empty().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    migrate::run(&db).await.expect("migrates");
    let conn = db.conn().await.expect("connects");
    conn.batch("edit", "insert into system.migrations (name, checksum) values ('9999_future', '')")
        .await
        .expect("writes");
    let error = migrate::run(&db).await.expect_err("refused").to_string();
    assert!(error.contains("newer Tidemark"), "{error}");
    conn.batch("edit", "delete from system.migrations where name = '9999_future'; update system.migrations set checksum = '' where name like '0001%'")
        .await
        .expect("writes");
    let error = migrate::run(&db).await.expect_err("refused").to_string();
    assert!(error.contains("edited"), "{error}");
}
